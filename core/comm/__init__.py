"""Communication between ranks, below everything that uses it.

| module | what it has |
| --- | --- |
| `collectives` | reduce-scatter, all-gather, all-reduce of flat buffers; ``what=`` names each in messages |
| `gloo` | how ranks exchange pieces directly where the backend is gloo |
| `lane` | where collectives run while the rank computes: a thread on CPU, a stream on CUDA |
| `record` | the last calls of this rank in each group, read when a collective fails |
"""
