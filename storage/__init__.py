"""qlora-sweep: what was observed. Records of trials and their studies, not how trials run."""
