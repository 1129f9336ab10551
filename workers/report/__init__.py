"""A replica's reports of its work: advertised profile, timelines, recent steps. No torch, no ray."""
