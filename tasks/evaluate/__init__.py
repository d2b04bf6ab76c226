"""Evaluate: accuracy on prompts that are never trained on. A rollout without a cut, on the engine of generate."""
