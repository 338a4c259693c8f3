"""The sLSTM, whose gates may see the output before, so that one token follows the other."""

from flashmix.ops.slstm.op import slstm_cell

__all__ = ["slstm_cell"]
