"""Which tokens the next step computes: requests, pages, costs, chunks. No torch, no clock, no ray."""
