"""Find what causes red records: findings, each with the features of a case that it needs."""
