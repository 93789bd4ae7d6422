"""What the wrong connectors of a soak break; shared with the test, without vLLM."""

MARK = 250  # sessions whose prompt's token here is even are those that the engine damages
FLIPPED_START = 256  # the chunk that begins here has its bit flipped
