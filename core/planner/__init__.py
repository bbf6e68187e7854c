"""Says what a run would cost, before there is an accelerator: ``python -m shardstack.planner`` and the flags of the
run.

The model, its wrapper and its optimizer run a step as one rank of any number, on tensors without values and a network
without messages. What they allocate, compute and send is recorded, and set against the numbers of a hardware.

    recorder     what a run allocates, computes and sends, in order
    phantom      tensors whose values are never computed
    world        fake process groups, and what else a simulated run has around it
    simulation   the step of a run on them: memory over time by category, operations and collectives in order
    hardware     rates and latencies: presets with sources, and measured ones
    step_time    how long a simulated step takes, and which communication is hidden
    estimates    all of it for one wrapper, next to closed formulas, and a command line under each wrapper
    search       changes of a run, and numbers of ranks, compared by plans of shallow models
    tables       text and HTML
    __main__     the command
"""

from .estimates import Estimate, estimate
from .hardware import PRESETS, Hardware, find_hardware
from .simulation import Simulation, simulate

__all__ = ["PRESETS", "Estimate", "Hardware", "Simulation", "estimate", "find_hardware", "simulate"]
