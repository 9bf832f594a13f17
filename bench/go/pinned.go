//go:build pinned

package main

// Keeps in go.mod the version of franz-go whose own test suite is run.
import _ "github.com/twmb/franz-go/pkg/kgo"
