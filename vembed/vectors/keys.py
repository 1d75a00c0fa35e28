"""Keys of a teacher and of the mining of hard negatives, and the options of an index."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from vembed.data.keys import loss_names, takes_pairs
from vembed.losses.registry import filters_by_teacher, loss_section
from vembed.registry import INDEX_FORMATS, LOSSES
from vembed.section import ANY, LARGEST_COUNT, Count, Name, NonNegative, Rule, Section, Share, key, names_of, option

if TYPE_CHECKING:
    from vembed.config.schema import Config

_MINES: dict[str, tuple[object, ...]] = {"mine": ("once", {"minimum": 1})}

SOURCES = ("mine", "mine_corpus", "mine_teacher")
"""Keys that say when a run mines and with what; `vembed mine` has options of its own for them."""


class TeacherKeys(Section):
    """Teacher model that a loss learns from; it runs once, before the first step."""

    teacher_model_name: Name | None = key(
        None,
        "Model that a loss learns from, or that detects false negatives: hub id or local folder of any encoder. A "
        "cross-encoder of sentence-transformers (vembed[st]) works too, for scores of a row's own documents.",
    )
    teacher_revision: Name | None = key(
        None,
        "Branch, tag or commit of a teacher on the hub. null: the hub's default branch.",
        acts_with={"teacher_model_name": ANY},
    )
    teacher_cache: Name = key(
        "auto",
        "Folder for the teacher's results on the training data; runs may share it. auto: OUTPUT_DIR/teacher.",
        acts_with={"teacher_model_name": ANY},
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "`teacher_model_name` must be set if the loss reads a teacher, and only then.",
            ("teacher_model_name", "loss_type", "added_losses", "data", "label_kind", "false_negative_filter"),
            lambda config: _teacher_without_reader(config),
        ),
        Rule(
            "`teacher_model_name` has no effect with `distillation_alpha: 1`, unless something else reads the teacher.",
            (
                *("teacher_model_name", "distillation_alpha", "loss_type", "added_losses", "data", "label_kind"),
                "false_negative_filter",
            ),
            lambda config: _teacher_without_weight(config),
        ),
        Rule(
            "`false_negative_filter` has no effect on `cosent` where pairs have scores: it compares these pairs alone.",
            ("false_negative_filter", "label_kind", "teacher_model_name", "loss_type", "added_losses", "data"),
            lambda config: _filter_of_scored_pairs(config),
        ),
        Rule(
            "`teacher_model_name` must not be a `builtin:` model, which is untrained.",
            ("teacher_model_name",),
            lambda config: (config.teacher_model_name or "").startswith("builtin:"),
            "{teacher_model_name} is untrained and has nothing to teach; name the folder of a trained model",
        ),
    )


class MiningKeys(Section):
    """Choice of hard negatives among the documents that a model retrieves."""

    mine: Literal["never", "once"] | Count = key(
        "never",
        "Mine hard negatives with the current model, among the documents of the training data. once: before the first "
        "epoch. A number: every so many epochs.",
        unit="epochs",
    )
    mine_corpus: Name | None = key(
        None,
        "More documents to mine negatives from: a file, folder or set, in the forms of vembed encode --data. null: "
        "only the documents of the training data.",
        acts_with=_MINES,
    )
    mine_teacher: Name | None = key(
        None,
        "Better model whose scores the margins and bounds use: hub id or folder of any encoder, or of a "
        "sentence-transformers cross-encoder (vembed[st]). null: the mining model's scores.",
        acts_with=_MINES,
    )
    mine_negatives: Count = key(
        4, "Largest number of hard negatives to mine for each row.", unit="documents", acts_with=_MINES
    )
    mine_range_min: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] = key(
        0,
        "Number of nearest documents to skip; with 10, the 11th is the first candidate.",
        unit="documents",
        acts_with=_MINES,
    )
    mine_range_max: Count = key(
        100,
        "Rank of the last candidate; known positives aren't counted.",
        unit="documents",
        acts_with=_MINES,
    )
    mine_relative_margin: Share | None = key(
        0.05,
        "A candidate's score must be at most (1 - this) times the best positive's (0.05: 95%). null: no such limit.",
        acts_with=_MINES,
    )
    mine_absolute_margin: NonNegative | None = key(
        None,
        "A candidate's score must be at least this much below the best positive's. null: no such limit.",
        acts_with=_MINES,
    )
    mine_min_score: float | None = key(None, "Lowest score of a candidate. null: no limit.", acts_with=_MINES)
    mine_max_score: float | None = key(None, "Highest score of a candidate. null: no limit.", acts_with=_MINES)
    mine_sampling: Literal["top", "random"] = key(
        "top",
        "Choice among the candidates. top: the nearest. random: some at random, the same for the same seed.",
        acts_with=_MINES,
    )
    mine_index: Name = key(
        "Flat",
        "FAISS index to search. Flat: exact. IVF4096,Flat:nprobe=32: suits millions of documents.",
        acts_with=_MINES,
    )
    mine_replace: bool = key(
        False, "Replace the negatives of the rows; otherwise the mined ones follow them.", acts_with=_MINES
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "`mine_teacher` must not be a `builtin:` model, which is untrained.",
            ("mine_teacher",),
            lambda config: (config.mine_teacher or "").startswith("builtin:"),
            "{mine_teacher} is untrained and has nothing to teach; name the folder of a trained model",
        ),
        Rule(
            "`mine` needs rows with positives, not scores of pairs.",
            ("mine", "label_kind"),
            lambda config: config.mine != "never" and config.label_kind in {"pair", "grade"},
            "mine needs rows with positives, and label_kind {label_kind} gives pairs a score; leave one out",
        ),
    )

    def mining(self) -> dict[str, Any]:
        """Return the keys that decide which candidates are taken."""
        return {name: getattr(self, name) for name in MiningKeys.model_fields if name not in SOURCES}


def teacher_gives_scores(config: "Config") -> bool:
    """Return whether a teacher's scores of a row's own documents replace those that data may list.

    A loss that learns from positives as well keeps to them where the teacher is there for something else.
    """
    losses = [loss_section(name) for name in loss_names(config) if name in LOSSES]
    scored = [loss for loss in losses if {"pairs", "lists"} & set(loss.takes)]
    if config.teacher_model_name is None or config.label_kind in ("pair", "grade") or not scored:
        return False
    needs_scores = any("positives" not in loss.takes for loss in scored)
    return needs_scores or not (filters_by_teacher(config) or any(loss.reads_teacher for loss in losses))


def _teacher_without_reader(config: "Config") -> str:
    has_teacher = config.teacher_model_name is not None
    names = [name for name in loss_names(config) if name in LOSSES]
    is_read = filters_by_teacher(config) or any(loss_section(name).reads_teacher for name in names)
    if has_teacher == (is_read or (has_teacher and teacher_gives_scores(config))):
        return ""
    if is_read:
        reader = "false_negative_filter teacher" if filters_by_teacher(config) else f"loss_type {config.loss_type}"
        return f"{reader} reads a teacher's vectors, but there is none; set teacher_model_name"
    if takes_pairs(*names):
        return f"label_kind {config.label_kind} gives the scores already; leave it out, or teacher_model_name"
    return (
        "nothing reads the teacher: set false_negative_filter to teacher or loss_type to distillation, or leave "
        "teacher_model_name out"
    )


def _teacher_without_weight(config: Any) -> str:
    names = [name for name in loss_names(config) if name in LOSSES]
    others = any(loss_section(name).reads_teacher for name in names if name != "distillation")
    is_idle = config.teacher_model_name is not None and "distillation" in names and config.distillation_alpha == 1
    if not is_idle or others or filters_by_teacher(config) or teacher_gives_scores(config):
        return ""
    return (
        "teacher_model_name has no effect with distillation_alpha 1, which is InfoNCE alone; set loss_type to infonce "
        "and remove it, or set distillation_alpha below 1"
    )


def _filter_of_scored_pairs(config: Any) -> str:
    names = [name for name in loss_names(config) if name in LOSSES]
    readers = [name for name in names if "false_negative_filter" in loss_section(name).model_fields]
    if readers != ["cosent"] or config.false_negative_filter == "identity":
        return ""
    if config.label_kind in ("pair", "grade"):
        scores = f"label_kind {config.label_kind}"
    elif teacher_gives_scores(config):
        scores = "scores of the teacher"
    else:
        return ""
    return (
        f"false_negative_filter {config.false_negative_filter} has no effect with {scores}: cosent compares the pairs "
        "with scores alone, and leaves none out; set false_negative_filter to identity"
    )


class IndexKeys(Section):
    """Options of an index: how a corpus is read, encoded and written."""

    format: Annotated[str, names_of(INDEX_FORMATS, "index")] | None = option(
        None,
        "index (a folder, default), parquet (one file), lancedb (a table in a folder; needs vembed[lancedb])",
    )
    side: Literal["document", "query"] = option(
        "document", "add the prompt of this side to the texts; default: document"
    )
    index: str = option(
        "Flat",
        "FAISS index: Flat (exact, default), HNSW32, IVF1024,Flat; int8 or binary: small, then rescored",
        metavar="FACTORY",
    )
    batch_size: Count = option(256, "largest number of items per encoder call", metavar="N")
    ray: str | None = option(
        None,
        "encode texts as a Ray Data job, on the cluster at HOST:PORT or the one that Ray finds or starts on this "
        "machine (needs vembed[ray])",
        metavar="ADDRESS",
        bare="",
    )
    ray_workers: Count | None = option(
        None, "workers of --ray; default: one for each GPU, or for each 4 CPUs", metavar="N"
    )
    id_column: str | None = option(None, "default: _id, id, docid or doc_id", metavar="NAME")
    text_column: str | None = option(None, "default: text, document, passage, contents or content", metavar="NAME")
    image_column: str | None = option(None, "default: image, positive_image or image_path", metavar="NAME")
    image_root: Path | None = option(
        None, "folder that picture paths start from; default: the corpus's folder", metavar="DIR"
    )
    overwrite: bool = option(False, "replace an index that is there")
