"""The figures of a report: a study's snapshot in, a plotly figure out."""
