"""Communication between ranks, below everything that uses it.

| module | what it does |
| --- | --- |
| `collectives` | reduce-scatter, all-gather and all-reduce of flat buffers; ``what=`` names each in messages |
| `by_backend` | torch's collectives on tensors of any shape, recorded: activations, batches, a few numbers |
| `gloo` | exchanges pieces directly between ranks under gloo |
| `streams` | streams of a GPU, and the points at which they wait for each other |
| `lane` | runs collectives while the rank computes: on a thread on CPU, on a stream on CUDA |
| `record` | keeps the last calls of this rank in each group, to explain a collective that fails |
| `flight_recorder` | where ranks are by torch's own record |
| `call` | one call of a collective: its name, its time, and the error that explains its failure |
| `host_read` | reads numbers of the device without stopping it, and explains a collective that never ends |
| `memory` | allocates memory of collectives, registered with the backend where it can be |
| `sums` | adds the pieces that ranks have exchanged |
"""
