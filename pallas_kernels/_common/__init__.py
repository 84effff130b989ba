"""What the ops share: dispatch, hardware facts, interpreter, timing, checks."""
