"""The half that keeps bytes; knows neither vLLM nor torch."""
