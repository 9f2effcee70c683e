"""The release gate: identity pinned, every departure judged by a policy, and what a drafter is worth."""
