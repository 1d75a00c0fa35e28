"""What a page shows of the vectors of a set: the items of the map, their small pictures, and the words below."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from vembed.evaluation.report.examples import pictures_of
from vembed.evaluation.report.geometry import NEAR_COSINE
from vembed.evaluation.report.pictures import Thumbnails
from vembed.evaluation.text import one_line
from vembed.text import plural

if TYPE_CHECKING:
    from vembed.batch import Image, Item
    from vembed.data.retrieval import RetrievalData
    from vembed.evaluation.report.data import RunReport
    from vembed.evaluation.report.geometry import Geometry, Point

MAP_PICTURES, MAP_FORMS = 120, ((48, 50),)
"""Most pictures of an embedding map, and how large each is stored; further ones are dots."""


@dataclass(frozen=True, slots=True)
class EmbeddingMap:
    """The map and the near-duplicates, ready to show."""

    geometry: Geometry
    task: RetrievalData
    thumbnails: Thumbnails  # of the map's pictures, small

    @classmethod
    def of(cls, report: RunReport) -> Self | None:
        """Return what a report shows of its vectors; None where the run had none."""
        found = report.geometry
        if found is None:
            return None
        pictures = [shown[0] for point in found.points if (shown := pictures_of(item_of(report.task, point)))]
        kept = pictures[:: -(-len(pictures) // MAP_PICTURES)] if pictures else []
        return cls(found, report.task, Thumbnails.of(kept, report.image_limits, forms=MAP_FORMS))

    def item(self, point: Point) -> Item | None:
        """Return what a point stands for."""
        return item_of(self.task, point)

    @property
    def words(self) -> str:
        """What the map shows."""
        num_queries = sum(point.side == "query" for point in self.geometry.points)
        documents = plural(len(self.geometry.points) - num_queries, "document")
        return (
            f"{plural(num_queries, 'query', 'queries')} (rings) and {documents} of {one_line(self.task.name)} after "
            f"training, in the two directions in which they differ most (PCA): {100 * self.geometry.spread:.0f}% of "
            f"their variance. Point at one to read it."
        )

    @property
    def near_words(self) -> str:
        """How many documents are nearly the same to the model."""
        found = self.geometry
        among = f"(cosine over {NEAR_COSINE:g}, among {plural(found.num_compared, 'document')})"
        if not found.num_pairs:
            return f"No two documents are nearly the same to the trained model {among}."
        counted = plural(found.num_pairs, "pair of documents is", "pairs of documents are")
        shown = f" Shown: the {len(found.pairs)} closest, each document once." if found.num_pairs > 1 else ""
        return f"{counted} nearly the same to the trained model {among}: a search can hardly tell them apart.{shown}"


def item_of(task: RetrievalData, point: Point) -> Item | None:
    """Return what a point of a map stands for."""
    return (task.queries if point.side == "query" else task.documents).get(point.identifier)


def near_pictures(report: RunReport) -> list[Image]:
    """Return the pictures of the near-duplicates that are shown."""
    pairs = () if report.geometry is None else report.geometry.pairs
    found = (report.task.documents.get(name) for pair in pairs for name in pair[:2])
    return [picture for item in found for picture in pictures_of(item)]
