"""Forward and backward of every kernel that a run uses, on the machine it runs on, beside what is right."""
