"""Checkpoints of other libraries: `convert` to flashmix's and back, `load` into a decoder, `save` of one."""

from flashmix.checkpoints.convert import convert, load, save
from flashmix.checkpoints.families import FAMILIES
from flashmix.checkpoints.rules import ConversionError, Report

__all__ = ["FAMILIES", "ConversionError", "Report", "convert", "load", "save"]
