"""Communication between ranks, below everything that uses it.

| module | what it does |
| --- | --- |
| `collectives` | reduce-scatter, all-gather and all-reduce of flat buffers; ``what=`` names each in messages |
| `gloo` | exchanges pieces directly between ranks under gloo |
| `lane` | runs collectives while the rank computes: on a thread on CPU, on a stream on CUDA |
| `record` | keeps the last calls of this rank in each group, to explain a collective that fails |
| `sums` | adds the pieces that ranks have exchanged |
"""
