"""Each published mechanism in a file of its own: function, layer, preset, tiny call, source.

A function is a call of an engine. Shapes are `[B, T, H, D]`; `scale`, `initial_state`, `return_state`, `cu_seqlens` and `impl` are
those of the engine's op (`linear_attention`, `delta_rule`, `dplr`), to which they are handed on as `**options`, and so are the returned
pair and the errors. Where a paper has no scale, `scale` is 1. A mechanism with several states takes and returns them as a tuple.

An import registers its mechanism (`flashmix.mechanisms.registry`); the order of the imports is the order of every list.
"""
# ruff: noqa: I001

from flashmix.mechanisms.softmax_attention import SoftmaxAttention as SoftmaxAttention
from flashmix.mechanisms.deltanet import DeltaNet as DeltaNet, deltanet as deltanet
from flashmix.mechanisms.gated_deltanet import GatedDeltaNet as GatedDeltaNet, gated_deltanet as gated_deltanet
from flashmix.mechanisms.gla import GLA as GLA, gla as gla
from flashmix.mechanisms.simple_gla import simple_gla as simple_gla
from flashmix.mechanisms.kda import KDA as KDA, kda as kda
from flashmix.mechanisms.mamba2 import Mamba2 as Mamba2, mamba2 as mamba2
from flashmix.mechanisms.mamba3 import Mamba3 as Mamba3, mamba3 as mamba3
from flashmix.mechanisms.retnet import RetNet as RetNet, retnet as retnet
from flashmix.mechanisms.rwkv7 import RWKV7 as RWKV7, rwkv7 as rwkv7
from flashmix.mechanisms.linear_attention import LinearAttention as LinearAttention
from flashmix.mechanisms.linear_attention import normalised_linear_attention as normalised_linear_attention
from flashmix.mechanisms.lightning import Lightning as Lightning, lightning as lightning
from flashmix.mechanisms.hgrn2 import HGRN2 as HGRN2, hgrn2 as hgrn2
from flashmix.mechanisms.rwkv6 import RWKV6 as RWKV6, rwkv6 as rwkv6
from flashmix.mechanisms.gsa import GSA as GSA, gsa as gsa
from flashmix.mechanisms.abc import ABC as ABC, abc as abc
from flashmix.mechanisms.deltaproduct import DeltaProduct as DeltaProduct, deltaproduct as deltaproduct
from flashmix.mechanisms.erase_then_delta import erase_then_delta as erase_then_delta
from flashmix.mechanisms.comba import Comba as Comba, comba as comba
from flashmix.mechanisms.gated_deltanet2 import GatedDeltaNet2 as GatedDeltaNet2, gated_deltanet2 as gated_deltanet2
from flashmix.mechanisms.preconditioned import PreconditionedGatedDeltaNet as PreconditionedGatedDeltaNet
from flashmix.mechanisms.preconditioned import PreconditionedKDA as PreconditionedKDA
from flashmix.mechanisms.preconditioned import preconditioned_gated_deltanet as preconditioned_gated_deltanet
from flashmix.mechanisms.preconditioned import preconditioned_kda as preconditioned_kda
from flashmix.mechanisms.oja import Oja as Oja, oja as oja
from flashmix.mechanisms.iplr import IPLR as IPLR, iplr as iplr
from flashmix.mechanisms.hgrn import hgrn as hgrn
from flashmix.mechanisms.mingru import mingru as mingru
from flashmix.mechanisms.minlstm import minlstm as minlstm
from flashmix.mechanisms.rg_lru import RGLRU as RGLRU, rg_lru as rg_lru
from flashmix.mechanisms.rwkv4 import RWKV4 as RWKV4, rwkv4 as rwkv4
from flashmix.mechanisms.state_space import lru as lru, s4d as s4d, s5 as s5
from flashmix.mechanisms.slstm import slstm as slstm
from flashmix.mechanisms.mamba import Mamba as Mamba, mamba as mamba
from flashmix.mechanisms.mlstm import MLSTM as MLSTM, mlstm as mlstm
from flashmix.mechanisms.qdelta import QDelta as QDelta, qdelta as qdelta
from flashmix.mechanisms.log_linear import LogLinearMamba2 as LogLinearMamba2, log_linear as log_linear
from flashmix.mechanisms.log_linear import log_linear_gated_deltanet as log_linear_gated_deltanet
from flashmix.mechanisms.mesa_net import MesaNet as MesaNet, mesa_net as mesa_net
from flashmix.mechanisms.based import based as based
from flashmix.mechanisms.rebased import rebased as rebased
from flashmix.mechanisms.lightnet import lightnet as lightnet
from flashmix.mechanisms.higher_order import higher_order as higher_order
from flashmix.mechanisms.rodimus import rodimus as rodimus
from flashmix.mechanisms.raven import raven as raven
from flashmix.mechanisms.mom import mom as mom
from flashmix.mechanisms.momentum_deltanet import momentum_deltanet as momentum_deltanet
from flashmix.mechanisms.titans_linear import titans_linear as titans_linear
from flashmix.mechanisms.ttt_linear import ttt_linear as ttt_linear
from flashmix.mechanisms.latent_attention import LatentAttention as LatentAttention
