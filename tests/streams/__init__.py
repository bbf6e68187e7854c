"""Streams of a GPU, simulated on a CPU: races of a step are found without one.

`simulation` orders operations by vector clocks, `recorder` notes what each reads and writes, `installed` puts both in
the place of `core.comm.streams` and of torch's streams, `process` runs a function so, in a process of its own.
`docs/wrappers.md`, "On GPUs", says what is simulated and what is not.
"""
