"""Models written with meshdsl."""
