"""Training of EAGLE-3 heads from a teacher's own answers: five stages, each of which goes on where it was stopped."""
