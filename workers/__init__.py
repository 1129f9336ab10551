"""One replica: scheduler, pages, engine, model, sampler and its Ray side."""
