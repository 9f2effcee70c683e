"""Find out whether speculative greedy decoding in llama.cpp gives the tokens that vanilla gives.

The package runs a target model twice on the same prompt, without and with a drafter, compares the token ids,
and where they differ says why and makes the case as small as it can be. The command line (`specbisect`) is the
way in; the modules follow one direction, from `cell` (what is asked) through `engines` (what ran) and `compare`
(what came out) to `diagnose`, `narrow` and `report` (why, how small, and what to send upstream).
"""

__version__ = "0.1.0"
