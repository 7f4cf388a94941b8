"""The laboratory: testbeds, engines, studies with matched seeds, paired statistics and the report."""
