"""Code that loads a model and compares a query with documents, for each library that can.

Every example ends in `queries`, `documents` and `scores`, and runs where the model's folder lies; those of pictures
open picture.jpg and other.jpg there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vembed.evaluation.card.facts import ModelFacts, Recipe

TEXT_QUERY = "a red fox in the snow"
TEXT_DOCUMENTS = ("A fox with red fur walks through snow.", "The river runs to the sea.")

POOLING_CODE = {
    "mean": (
        '    mask = inputs["attention_mask"].unsqueeze(-1)',
        "    vectors = (tokens * mask).sum(dim=1) / mask.sum(dim=1)",
    ),
    "cls": ("    vectors = tokens[:, 0]",),
    "lasttoken": (
        '    last = inputs["attention_mask"].sum(dim=1) - 1',
        "    vectors = tokens[torch.arange(len(tokens)), last]",
    ),
}
"""How the tokens of a text become a vector."""

VISION_POOLING_CODE = {
    "head": "outputs.pooler_output",
    "cls": "outputs.last_hidden_state[:, 0]",
    "mean": "outputs.last_hidden_state.mean(dim=1)",
}


@dataclass(frozen=True, slots=True)
class Example:
    """One way to use a model.

    Attributes:
        library: What it uses, for a heading.
        install: The command that installs what it needs, "" where that is vembed alone.
        code: A Python program.
    """

    library: str
    install: str
    code: str


def examples(model: ModelFacts, folder: str) -> list[Example]:
    """Return an example for each library that loads the folder, that of its form first.

    Args:
        model: What is used.
        folder: Name of the model's folder.
    """
    name = _quoted(folder)
    found = []
    if model.form == "sentence-transformers":
        install = "pip install " + ("'sentence-transformers>=5.4'" if model.takes_pictures else "sentence-transformers")
        found.append(Example("sentence-transformers", install, _sentence_transformers(model, name)))
    if model.form == "open_clip":
        found.append(Example("open_clip", "pip install open_clip_torch", _open_clip(folder)))
    if model.form in ("sentence-transformers", "transformers") and model.recipe is not None:
        extra = " torchvision pillow" if model.takes_pictures else ""
        code = _transformers(model, model.recipe, name)
        found.append(Example("transformers", f"pip install 'transformers>=5' torch{extra}", code))
    found.append(Example("vembed", "", _vembed(model, name)))
    return found


def _sentence_transformers(model: ModelFacts, name: str) -> str:
    lines = ["from sentence_transformers import SentenceTransformer", "", f"model = SentenceTransformer({name})"]
    if not model.takes_pictures:
        lines += [
            f"queries = model.encode_query([{_quoted(TEXT_QUERY)}])",
            f"documents = model.encode_document({_document_list()})",
        ]
    else:
        lines.insert(0, "from PIL import Image")
        query = f"[{_quoted(TEXT_QUERY)}]" if model.takes_texts else '[Image.open("other.jpg").convert("RGB")]'
        lines += [
            f"queries = model.encode({query})",
            'documents = model.encode([Image.open("picture.jpg").convert("RGB")])',
        ]
    return "\n".join([*lines, "scores = model.similarity(queries, documents)", "print(scores)"])


def _open_clip(folder: str) -> str:
    return "\n".join(
        [
            "import open_clip",
            "import torch",
            "from PIL import Image",
            "",
            f"name = {_quoted(f'local-dir:{folder}')}  # from the hub: hf-hub:OWNER/NAME",
            "model, _, preprocess = open_clip.create_model_and_transforms(name)",
            "tokenizer = open_clip.get_tokenizer(name)",
            "model.eval()",
            "with torch.no_grad():",
            f"    queries = model.encode_text(tokenizer([{_quoted(TEXT_QUERY)}]), normalize=True)",
            '    pixels = torch.stack([preprocess(Image.open("picture.jpg").convert("RGB"))])',
            "    documents = model.encode_image(pixels, normalize=True)",
            "scores = queries @ documents.T",
            "print(scores)",
        ]
    )


def _transformers(model: ModelFacts, recipe: Recipe, name: str) -> str:
    classes = [recipe.auto_class]
    if model.takes_texts:
        classes.append("AutoTokenizer")
    if model.takes_pictures:
        classes.append("AutoImageProcessor")
    lines = ["import torch", *(["from PIL import Image"] if model.takes_pictures else [])]
    lines += [f"from transformers import {', '.join(sorted(classes))}", ""]
    lines += [f"name = {name}", f"model = {recipe.auto_class}.from_pretrained(name).eval()"]
    lines += ["tokenizer = AutoTokenizer.from_pretrained(name)"] if model.takes_texts else []
    lines += ["image_processor = AutoImageProcessor.from_pretrained(name)"] if model.takes_pictures else []
    lines += ["", ""]
    if model.takes_texts:
        lines += [*_encode_texts(model, recipe), "", ""]
    if model.takes_pictures:
        lines += [*_encode_pictures(recipe), "", ""]
    lines += ["with torch.no_grad():"]
    if recipe.kind == "text":
        prompts = model.prompts
        lines += [
            f"    queries = encode([{_quoted(prompts['query'] + TEXT_QUERY)}])",
            f"    documents = encode({_document_list(prompts['document'])})",
        ]
    else:
        query = f"encode_texts([{_quoted(TEXT_QUERY)}])" if model.takes_texts else 'encode_pictures(["other.jpg"])'
        lines += [f"    queries = {query}", '    documents = encode_pictures(["picture.jpg"])']
    return "\n".join([*lines, "scores = queries @ documents.T", "print(scores)"])


def _encode_texts(model: ModelFacts, recipe: Recipe) -> list[str]:
    arguments = {**recipe.text_padding, "truncation": True, "max_length": model.max_length, "return_tensors": "pt"}
    given = ", ".join(
        f"{key}={_quoted(value) if isinstance(value, str) else value}" for key, value in arguments.items()
    )
    tokenize = f"    inputs = tokenizer(texts, {given})"
    if recipe.kind == "dual":
        return [
            "def encode_texts(texts):",
            tokenize,
            '    vectors = model.get_text_features(input_ids=inputs["input_ids"]).pooler_output',
            "    return torch.nn.functional.normalize(vectors.float(), dim=-1)",
        ]
    call = 'model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])'
    result = (
        "torch.nn.functional.normalize(vectors.float(), dim=-1)" if model.similarity == "cosine" else "vectors.float()"
    )
    return [
        "def encode(texts):",
        tokenize,
        f"    tokens = {call}.last_hidden_state",
        *POOLING_CODE[recipe.pooling],
        f"    return {result}",
    ]


def _encode_pictures(recipe: Recipe) -> list[str]:
    lines = [
        "def encode_pictures(paths):",
        '    pictures = [Image.open(path).convert("RGB") for path in paths]',
        '    inputs = image_processor(images=pictures, return_tensors="pt")',
        '    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)',
    ]
    if recipe.kind == "dual":
        lines.append("    vectors = model.get_image_features(**inputs).pooler_output")
    else:
        lines.append('    outputs = model(pixel_values=inputs["pixel_values"])')
        lines.append(f"    vectors = {VISION_POOLING_CODE[recipe.pooling]}")
    return [*lines, "    return torch.nn.functional.normalize(vectors.float(), dim=-1)"]


def _vembed(model: ModelFacts, name: str) -> str:
    lines = ["import vembed", "", f"model = vembed.load({name})"]
    if not model.takes_pictures:
        query, documents = f"[{_quoted(TEXT_QUERY)}]", _document_list()
    else:
        lines.insert(0, "from pathlib import Path\n")
        query = f"[{_quoted(TEXT_QUERY)}]" if model.takes_texts else '[Path("other.jpg")]'
        documents = '[Path("picture.jpg")]'
    lines += [
        f'queries = model.encode({query}, side="query")',
        f'documents = model.encode({documents}, side="document")',
    ]
    return "\n".join([*lines, "scores = queries @ documents.T", "print(scores)"])


def _quoted(text: str) -> str:
    """Return a text as a literal on one line of Python, readable where every character can be seen."""
    if not text.isprintable():
        return ascii(text)
    inner = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{inner}"'


def _document_list(prompt: str = "") -> str:
    return "[" + ", ".join(_quoted(prompt + text) for text in TEXT_DOCUMENTS) + "]"
