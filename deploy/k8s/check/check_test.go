// Package check_test holds the manifests to the types of the Kubernetes API and of KEDA. It is a
// module of its own, so that the programs do not depend on either.
package check_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"testing"

	kedav1alpha1 "github.com/kedacore/keda/v2/apis/keda/v1alpha1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// documents are those of a file of manifests.
func documents(t *testing.T, b []byte) (out [][]byte) {
	t.Helper()
	r := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(b)))
	for {
		doc, err := r.Read()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, doc)
	}
}

// workload is what other objects refer to.
type workload struct {
	labels labels.Set
	ports  map[string]bool
}

// check decodes manifests strictly, and follows what refers to something else. It returns what is
// wrong, and how many objects there are of each kind.
func check(t *testing.T, manifests []byte) (wrong []string, kinds map[string]int) {
	t.Helper()
	kinds = map[string]int{}
	workloads := map[string]workload{}
	bad := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	var after []func()
	for i, doc := range documents(t, manifests) {
		var head metav1.TypeMeta
		if err := yaml.Unmarshal(doc, &head); err != nil {
			bad("document %d: %v", i, err)
			continue
		}
		kinds[head.Kind]++
		at := head.APIVersion + " " + head.Kind
		into := map[string]any{
			"apps/v1 Deployment": &appsv1.Deployment{}, "v1 Service": &corev1.Service{}, "policy/v1 PodDisruptionBudget": &policyv1.PodDisruptionBudget{},
			"keda.sh/v1alpha1 ScaledObject": &kedav1alpha1.ScaledObject{},
		}[at]
		if into == nil {
			bad("document %d: nobody knows %q; add its type here", i, at)
			continue
		}
		if err := yaml.UnmarshalStrict(doc, into); err != nil {
			bad("document %d, %s: %v", i, at, err)
			continue
		}
		selects := func(name string, sel labels.Set) {
			if w, ok := workloads[name]; len(sel) == 0 || !ok || !sel.AsSelector().Matches(w.labels) {
				bad("%s %s selects %v, which matches no pods of the deployment of that name", at, name, sel)
			}
		}
		switch o := into.(type) {
		case *appsv1.Deployment:
			pod := o.Spec.Template
			w := workload{labels.Set(pod.Labels), map[string]bool{}}
			workloads[o.Name] = w
			if o.Spec.Selector == nil || !labels.Set(o.Spec.Selector.MatchLabels).AsSelector().Matches(w.labels) {
				bad("deployment %s: the selector does not match its pods", o.Name)
			}
			volumes := map[string]bool{}
			for _, v := range pod.Spec.Volumes {
				volumes[v.Name] = true
			}
			for _, c := range pod.Spec.Containers {
				for _, p := range c.Ports {
					w.ports[p.Name] = true
				}
				for _, m := range c.VolumeMounts {
					if !volumes[m.Name] {
						bad("deployment %s mounts %s, which is no volume", o.Name, m.Name)
					}
				}
				for _, p := range []*corev1.Probe{c.ReadinessProbe, c.LivenessProbe} {
					if p == nil || p.HTTPGet == nil || p.HTTPGet.Port.Type != intstr.String || !w.ports[p.HTTPGet.Port.StrVal] {
						bad("deployment %s: a probe is missing, or asks no port of the container", o.Name)
					}
				}
				if c.Image == "" || c.Resources.Limits.Memory().IsZero() {
					bad("deployment %s: no image or no limit of memory", o.Name)
				}
			}
		case *corev1.Service:
			after = append(after, func() {
				selects(o.Name, o.Spec.Selector)
				for _, p := range o.Spec.Ports {
					if !workloads[o.Name].ports[p.TargetPort.StrVal] {
						bad("service %s: port %s is none of the pods'", o.Name, p.TargetPort.String())
					}
				}
			})
		case *policyv1.PodDisruptionBudget:
			after = append(after, func() {
				if o.Spec.Selector == nil {
					bad("budget %s has no selector", o.Name)
					return
				}
				selects(o.Name, o.Spec.Selector.MatchLabels)
			})
		case *kedav1alpha1.ScaledObject:
			after = append(after, func() {
				if o.Spec.ScaleTargetRef == nil || workloads[o.Spec.ScaleTargetRef.Name].labels == nil || len(o.Spec.Triggers) == 0 {
					bad("scaled object %s has no target that is here, or no triggers", o.Name)
				}
				if err := kedav1alpha1.ValidateTriggers(o.Spec.Triggers); err != nil {
					bad("scaled object %s: %v", o.Name, err)
				}
				if err := kedav1alpha1.CheckReplicaCountBoundsAreValid(o); err != nil {
					bad("scaled object %s: %v", o.Name, err)
				}
			})
		}
	}
	for _, f := range after { // an object may refer to one behind it
		f()
	}
	return wrong, kinds
}

func TestTheManifestsAreWhatKubernetesAndKEDATake(t *testing.T) {
	b, err := os.ReadFile("../palimpsest.yaml")
	if err != nil {
		t.Fatal(err)
	}
	wrong, kinds := check(t, b)
	for _, w := range wrong {
		t.Error(w)
	}
	for kind, n := range map[string]int{"Deployment": 2, "Service": 2, "PodDisruptionBudget": 2, "ScaledObject": 1} {
		if kinds[kind] != n {
			t.Errorf("found %d of kind %s, want %d", kinds[kind], kind, n)
		}
	}
}

// Each change breaks the manifests: a check that lets it through checks nothing.
func TestWhatIsWrongInManifestsIsFound(t *testing.T) {
	b, err := os.ReadFile("../palimpsest.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range [][2]string{
		{"replicas: 2", "replica: 2"},
		{"replicas: 2", "replicas: two"},
		{"readinessProbe:", "readyProbe:"},
		{"containerPort: 8080", "containerPort: http"},
		{"name: http, containerPort: 8080", "name: web, containerPort: 8080"},
		{"targetPort: http", "targetPort: web"},
		{"{name: tokens, mountPath: /tokens", "{name: token, mountPath: /tokens"},
		{"minAvailable: 1", "minAvailable: [1]"},
		{"selector: {app.kubernetes.io/name: appender}", "selector: {app.kubernetes.io/name: appenders}"},
		{"apiVersion: policy/v1", "apiVersion: policy/v1beta1"},
		{"maxReplicaCount: 8", "maxReplicas: 8"},
		{"maxReplicaCount: 8", "maxReplicaCount: 1"},
		{"scaleTargetRef: {name: projector}", "scaleTargetRef: {name: projectors}"},
		{"    - type: prometheus", "    - kind: prometheus"},
	} {
		broken := bytes.Replace(b, []byte(c[0]), []byte(c[1]), 1)
		if bytes.Equal(broken, b) {
			t.Errorf("the manifests have no %q", c[0])
		} else if wrong, _ := check(t, broken); len(wrong) == 0 {
			t.Errorf("%q in the place of %q was not found", c[1], c[0])
		}
	}
}
