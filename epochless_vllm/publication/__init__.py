"""Two-phase publication: journal, coordinator, participant. Standard library only; ranks are reached through a port."""
