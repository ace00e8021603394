"""What was observed: records of trials and the the studies that hold them, not how trials run."""
