"""What a replica reports of its work: advertised profile, timelines, recent steps. No torch, no ray."""
