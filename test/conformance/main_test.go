package conformance_test

import (
	"os"
	"testing"

	"palimpsest/test/e2e/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }
