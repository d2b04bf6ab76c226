"""What runs after what. No algorithm here."""
