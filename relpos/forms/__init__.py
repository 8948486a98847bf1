"""What encodings are made of: their base class, the forms of a bias, the call of attention, rotations, parameters."""
