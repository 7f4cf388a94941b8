"""Making runs: one (`train`, `trial`) or many (`study`), resumable after anything."""
