"""Mathematical questions: sets of them, answers read and compared, and what went wrong."""
