"""The winner of a study as a runnable recipe; `formats` is the way in."""
