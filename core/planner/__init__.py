"""Says what a run would cost, before there is an accelerator: ``python -m core.planner`` and the flags of the run.

The model, its wrapper and its optimizer run a step as one rank of any number, on tensors without values and a network
without messages. What they allocate, compute and send is recorded, and set against the numbers of a hardware.

    phantom      tensors whose values are never computed, and a record of allocations, operations and collectives
    world        fake process groups, and what else a simulated run has around it
    simulation   the step of a run on them: memory over time by category, operations and collectives in order
    hardware     rates and latencies: presets with sources
    step_time    how long a simulated step takes, and which communication is hidden
    formula      memory and operations in closed formulas
    estimates    all of it for one wrapper, and the settings of a command line under each wrapper
    search       changes of a run, and numbers of ranks, compared by plans of shallow models
    calibrate    measures the rates of the machine
    tables       text
    page         HTML
    __main__     the command
"""

from .estimates import Estimate, estimate
from .hardware import PRESETS, Hardware, find_hardware
from .simulation import Simulation, simulate

__all__ = ["PRESETS", "Estimate", "Hardware", "Simulation", "estimate", "find_hardware", "simulate"]
