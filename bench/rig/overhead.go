package rig

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
)

// PrintOverheads prints them as a table, or as JSON, one a line.
func PrintOverheads(w io.Writer, asJSON bool, about string, all []Overhead) error {
	if asJSON {
		enc := json.NewEncoder(w)
		for _, o := range all {
			if err := enc.Encode(o); err != nil {
				return err
			}
		}
		return nil
	}
	fmt.Fprintf(w, "%s\n\n", about)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "case\tevents/s with\twithout\tratio\tcpu ratio\t")
	for _, o := range all {
		fmt.Fprintf(t, "%s\t%.0f\t%.0f\t%.3f\t%.3f\t\n", o.Name, o.Value, o.Without, o.Ratio, o.CPURatio)
	}
	return t.Flush()
}
