"""What a red run asks beside what it judges: what confirms its findings, and what planted bugs are known by."""
