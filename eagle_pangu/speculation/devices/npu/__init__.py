"""Ascend NPUs, by torch_npu.

Nothing here has run on a card: it is written to the operators' documentation, and tested against a stand-in that
refuses what the documentation refuses (`tests/simulated_npu`).
"""
