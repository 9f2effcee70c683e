"""Narrowing: from a finding to the smallest case that still earns the same label.

The searches in `ddmin` are generic and know nothing about llama. A `candidate` is the original case with a patch;
all go through one `gate`, which is told by a `trial` in a worker process what a candidate shows. The stages (`layers`,
`settings`, `tensors`, `tokens`) say what to try next, `smallest` in which order, `explain` what lies around the
result, and `run` puts it all together.
"""
