"""One operating-system facility per module. Nothing here decides; it observes and acts when told."""
