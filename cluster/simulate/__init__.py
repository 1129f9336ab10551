"""`crossdock simulate`: the real scheduler, pages and router on a clock that StepCost drives."""
