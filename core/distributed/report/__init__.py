"""What a wrapper made of a model, as a table or as a page: `describe`.

wire    what a step puts on the wire, by the settings of a unit
facts   what each unit is, keeps and gathers, out of the plan
table   as text
page    as HTML, with the picture
"""

from .facts import model_facts
from .render import describe

__all__ = ["describe", "model_facts"]
