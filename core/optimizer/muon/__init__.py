"""Muon, a plug-in of the optimizer: loaded when `OptimizerConfig.optimizer` is ``"muon"``.

builder         which parameters it updates; what `get_megatron_optimizer` calls
rule            the update
matrices        the matrices of parameters, their table, and the Newton-Schulz iteration
matrix_owners   the rank that updates each matrix, and the exchanges between ranks
"""
