"""The pass over the states of MesaNet, in Triton; flashmix/ops/mesa/gluon_hopper launches it."""
