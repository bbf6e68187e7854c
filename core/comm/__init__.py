"""Communication between ranks, below everything that uses it.

| module | what it does |
| --- | --- |
| `collectives` | of flat buffers, and torch's on any tensor; ``what=`` names each in messages; their memory |
| `gloo` | exchanges pieces directly between ranks under gloo, and adds them |
| `message_formats` | parameters and gradients in bf16 on their way, or in blocks of 8-bit codes |
| `messages` | what travels in the place of a tensor: contiguous, in a dtype of every backend |
| `streams` | streams of a GPU, and the points at which they wait for each other |
| `lane` | runs collectives while the rank computes, and reads numbers of the device without stopping it |
| `record` | records the calls of this rank; asks other ranks for theirs when one fails |
| `out_of_step` | explains a collective that failed, or ranks that wait for each other, by the records of all ranks |
| `call` | one call of a collective: its time, the error that explains its failure; the last calls; torch's record |
"""
