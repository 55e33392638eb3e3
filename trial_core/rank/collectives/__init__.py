"""How ranks find each other and exchange what they have."""
