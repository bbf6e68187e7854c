"""What a wrapper made of a model, as a table or as a page: `describe`.

wire    what a step puts on the wire, by the settings of a unit
facts   what each unit is, keeps and gathers
text    the table
html    the page, with the picture
"""

from .facts import ModelFacts, bucket_facts, sharded_facts
from .render import describe

__all__ = ["ModelFacts", "bucket_facts", "describe", "sharded_facts"]
