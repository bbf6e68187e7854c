"""Describes a wrapped model as a table or as a page: `describe`.

wire    computes the traffic of a unit in a step from its settings
facts   collects from the plan what each unit is, keeps and gathers
table   formats the facts as text
page    formats the facts as HTML, with the picture
"""

from .facts import model_facts
from .render import describe

__all__ = ["describe", "model_facts"]
