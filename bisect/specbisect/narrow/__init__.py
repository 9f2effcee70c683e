"""Narrowing: from a finding to the smallest case that still earns the same label.

The searches in `ddmin` are generic and know nothing about llama; the modules beside it say what a
candidate is (an axis, a prompt token, a draft, a tensor) and what "the same label" means.
"""
