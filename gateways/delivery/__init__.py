"""What all doors share: views, routing, publish, settle. Knows no wire."""
