"""llama.cpp itself: the library, its model files and vocabularies. Knows nothing of speculation."""
