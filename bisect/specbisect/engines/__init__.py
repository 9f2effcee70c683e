"""Engines run one arm of one case: a case goes in, a trace comes out."""
