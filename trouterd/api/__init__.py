"""The api process: the OpenAI-compatible endpoint, tokenization, detokenization, stop strings and metrics."""
